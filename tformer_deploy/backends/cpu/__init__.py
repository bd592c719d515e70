"""Graphs derived for one CPU from a bundle's portable ones: rewritten, optimised, weights packed once and mapped by all."""
