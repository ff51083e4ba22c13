"""Commands over campaigns: each module parses its arguments, builds a config and calls pipeline.

Users type `coldpress optimize` and so on. `coldpress --help` imports all of them, so that they
import pipeline in functions. An error that refuses a campaign exits with 3, as 1 is for outcomes.
"""
