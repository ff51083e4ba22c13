"""What makes the figures in the documentation; each module prints its tables with the machine, the versions and its own command."""
