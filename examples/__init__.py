"""Example catalogs and their models; `python -m examples.prepare` makes the files that they read.

catalog.yaml   four small models, with every field explained: start here
zoo.yaml       every kind of source, with common architectures
broken.yaml    everything that can go wrong: each entry ends in a different way
"""
