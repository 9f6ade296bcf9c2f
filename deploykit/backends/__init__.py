"""Backends: each module here meets `deploykit.backend.Backend`."""
