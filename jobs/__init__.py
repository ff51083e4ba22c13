"""Commands over campaigns: each module parses its arguments, builds a config and calls pipeline.

`coldpress optimize` in a checkout is `python -m jobs.optimize`, which is also what `ray job submit`
runs; so are the others. An error that refuses a campaign exits with 3, as 1 is for outcomes.
"""
