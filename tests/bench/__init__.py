"""Speed against mlx-lm on the same weights, in interleaved pairs. Not part of the tests: `make bench`."""
