"""Keep and exchange weights, gradients and the optimizer's state."""
