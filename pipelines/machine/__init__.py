"""What this machine can do (`doctor`), and a recipe for the images in a folder (`init`)."""
