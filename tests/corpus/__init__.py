"""Workloads to plan for, made from published shapes."""

from tests.corpus.shapes import CORPUS

__all__ = ["CORPUS"]
