"""Judge artifacts: metrics, the accuracy gate, golden samples, activation ranges and sensitivity."""
