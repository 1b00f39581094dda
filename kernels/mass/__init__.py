"""`attention_mass`: how much attention every key receives."""
