"""Samplers, guidance, pipelines and media files."""
