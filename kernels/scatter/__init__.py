"""`rope_shift_scatter`: stored K and V decoded, shifted, rotated and written to their places."""
