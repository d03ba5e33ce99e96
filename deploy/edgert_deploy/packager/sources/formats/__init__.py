"""The files of models: formats of other frameworks, weights beside a model, files that are no model."""
