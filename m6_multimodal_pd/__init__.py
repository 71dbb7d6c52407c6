"""m6: the full engine. First half: images and video in every request.

Since m5: a prompt may hold pictures. They become patches, a vision tower makes embeddings of them, and these stand in
the prompt where placeholder tokens stood, at positions of three axes (M-RoPE).
"""
