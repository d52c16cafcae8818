"""Serve trained models over HTTP: TensorFlow Serving's REST protocol, and a page to classify images."""
