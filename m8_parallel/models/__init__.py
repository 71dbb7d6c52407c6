"""The parts of a model that a rank has."""
