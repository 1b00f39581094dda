"""`selected_attention`: scattered, position-sorted queries over a run of keys."""
