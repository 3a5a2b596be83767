"""The side-by-side run of `ebbtide compare --framework jax`."""
