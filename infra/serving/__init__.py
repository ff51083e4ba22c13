"""Serve one frozen model over HTTP: as a process (service.py, `coldpress serve`), or as an
application of Ray Serve (serve_app.py).

May import: freezer. Read first: model_server.py, which both use.
"""
