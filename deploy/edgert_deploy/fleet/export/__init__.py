"""Export the fleet's reports from MQTT to Prometheus and OpenTelemetry."""
