"""Commands over campaigns: each module parses its arguments, builds a config and calls pipeline.

Users type `coldpress optimize` and so on. `coldpress --help` imports all of these modules, so they
import pipeline inside functions. An error that refuses a campaign exits with 3, as 1 is for
outcomes.
"""
