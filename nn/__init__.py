"""Pure layers and models over flat parameter trees."""
