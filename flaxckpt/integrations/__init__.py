"""What plugs flaxckpt into other packages; each module imports the one it is called."""
