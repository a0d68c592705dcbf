"""Benchmarks of OpenAI-compatible servers: workloads, a load generator, figures and reports.

Everything is measured from outside, over HTTP, so that our own server and other people's stand side by side. Knows
neither the engine nor the server: ours is a child process like any other.
"""
