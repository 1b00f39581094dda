"""Blending inside an unmodified vLLM. So far: its model under attention sessions."""
