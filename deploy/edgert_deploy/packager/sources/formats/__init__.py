"""The files of models: formats of other frameworks, separate weights, files that are not a model."""
