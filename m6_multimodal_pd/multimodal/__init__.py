"""From whatever a user calls a picture to what an engine needs of it: patches, tokens, positions, a key, embeddings."""
