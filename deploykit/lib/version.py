"""The version of deploykit."""

__version__ = "0.2.0"
