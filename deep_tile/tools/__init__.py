"""What is run by hand: the command line and what it calls. Nothing that multiplies imports this package."""
