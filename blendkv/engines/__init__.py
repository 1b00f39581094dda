"""Engines: models that blending runs on."""
