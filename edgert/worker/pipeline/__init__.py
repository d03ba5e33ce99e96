"""A request through the model: caches, preprocessing, batches, the engine, postprocessing."""
