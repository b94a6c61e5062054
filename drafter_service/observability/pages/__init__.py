"""HTML pages with SVG charts and tables, from numbers and text. Nothing here is specific to drafting.

A page loads nothing and runs no script. Colors are classes (`green`, `blue`, `amber`, `violet`, `gray`) of the style
sheet `page.css`, for light and dark screens.
"""
