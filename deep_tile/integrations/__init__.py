"""deep_tile inside of packages that people run, a module for each."""
