"""Readers that know no run and no backend: logs, records, metrics, stacks, charts."""
