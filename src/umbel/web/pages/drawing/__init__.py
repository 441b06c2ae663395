"""Drawings as SVG, made of plain data by pure functions; everything that is written is escaped."""
