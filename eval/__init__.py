"""Quality against speed: modes, fidelity, benchmarks."""
