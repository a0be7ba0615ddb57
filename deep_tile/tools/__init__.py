"""The command line and its commands. Nothing that multiplies imports this package."""
