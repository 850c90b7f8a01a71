"""HTTP handlers, one module per API. They await and write; formats are in `glm53.server.protocol`."""
