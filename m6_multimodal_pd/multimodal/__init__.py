"""From whatever a user calls a picture to what the engine needs of it: patches, tokens, positions, a key, embeddings."""
