"""Prelay beside what a newcomer would pick instead, on one machine and in one run."""
