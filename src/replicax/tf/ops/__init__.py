"""The array and math operations of TensorFlow, one module for each family."""
