"""Models as folders: Hugging Face's form, in and out."""
