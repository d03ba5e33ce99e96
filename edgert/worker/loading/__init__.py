"""From an installed version to a model that is loaded, checked and measured."""
