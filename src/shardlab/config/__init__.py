"""A config: its typed shape, how it is composed from YAML and overrides, and the rules that it must keep."""
