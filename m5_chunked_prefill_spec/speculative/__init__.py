"""Guessing tokens and verifying the guesses: who proposes, how many are worth it, and which of them are kept."""
