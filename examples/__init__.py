"""A catalog of four small models, and what makes them: `python -m examples.prepare`, then `jobs.optimize examples/catalog.yaml`."""
