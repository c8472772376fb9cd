"""What TransformerLens objects look like behind one small interface. See docs/architecture.md."""
