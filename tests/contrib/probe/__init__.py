"""An installed app that shows which connections tasks have."""
