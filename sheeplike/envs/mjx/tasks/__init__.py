"""The tasks that come with sheeplike; each file holds one family, its scene as an XML file beside it."""
