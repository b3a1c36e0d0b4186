"""What the page draws: SVG plots, and pictures of images."""
