"""Catalogs and the models that they name; `python -m examples.prepare` makes the files that these read.

catalog.yaml   four small models, with every field explained: start here
zoo.yaml       an entry of every kind of source, over the architectures that fleets are made of
broken.yaml    what can go wrong: each entry ends in its own way, and none stops another
"""
