"""Answers from a model's outputs: classes, texts, boxes, embeddings."""
