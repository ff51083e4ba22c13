"""Commands: each module parses its arguments, builds a config and calls pipeline."""
