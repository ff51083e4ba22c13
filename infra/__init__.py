"""What runs Coldpress in production: images, clusters, servers.

Imported by none of the other packages.
"""
