"""The models of the equivalence suite, for the engines that run a part."""

from tests.equivalence.conftest import reference_model, references

__all__ = ["reference_model", "references"]
